"""The stages of `quantize`: resolve, prepare, write (or search), measure, report."""
