"""Where every backbone layer is: layouts, slots, links and the store that acquires and releases layers."""
