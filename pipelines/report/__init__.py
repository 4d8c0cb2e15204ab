"""What people read: tables on the terminal, later Markdown and HTML."""
