"""Reports of a store's results: a comparison for the terminal, and documents in Markdown and HTML."""
