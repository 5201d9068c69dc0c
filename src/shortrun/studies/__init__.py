"""What the package does with its own methods: compare them, measure them, demonstrate them, reproduce the paper."""
