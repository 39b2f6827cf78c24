"""What a run will take before it is started: dry run, plan, built-in model shapes."""
