"""Showing results: tables for the terminal, Markdown, CSV and JSON."""
