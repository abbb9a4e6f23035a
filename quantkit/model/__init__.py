"""Loading, describing and mapping models: the only folder that imports transformers."""
