"""What this machine has, what will work on it, and what to do for the rest. Every probe fails soft with its reason."""
