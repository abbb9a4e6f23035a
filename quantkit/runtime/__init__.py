"""Running a model and knowing the machine it runs on: onnxruntime lives here and nowhere else."""
