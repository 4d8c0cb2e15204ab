"""Blocks of a document, written as HTML, Markdown, plots or terminal text."""
