"""From a name, a folder or a live module to a `ModelMap`. The only room that imports transformers."""
