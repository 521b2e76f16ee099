"""What the model calls that has more than one implementation: experts, attention; and the small pieces between them."""
