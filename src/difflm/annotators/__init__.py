"""What labels and checks texts: taggers, parsers, and the rules for E2E's fields."""
