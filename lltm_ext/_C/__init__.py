"""The built modules, one an op. Each registers its dispatcher ops when it is imported."""
