"""Settings to a plan: the stages to run, what they read, and every check before anything is spent."""
