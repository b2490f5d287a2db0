"""Foreign models: measuring any Hugging Face decoder as it stands."""
