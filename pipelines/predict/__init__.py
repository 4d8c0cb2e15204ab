"""Speed, memory and fleet size before anything runs."""
