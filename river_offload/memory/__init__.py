"""What we allocated, counted by name, and what the machine says it has."""
