"""Calibration: one streaming pass over a text collects the statistics that the chosen methods need.

`tokens` reads the text, `passes` runs the model over it block by block and leaves a folder of statistics,
`store` reads them back one matrix at a time.
"""
