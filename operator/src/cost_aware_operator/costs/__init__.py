"""What things cost: prices, memory. Pure functions and dated data."""
