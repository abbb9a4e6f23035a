"""An artifact as a model of lm-evaluation-harness."""
