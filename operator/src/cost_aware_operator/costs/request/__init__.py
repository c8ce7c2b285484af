"""Questions of `catj predict` as JSON: read strictly, answered in order."""
