"""What the self-test and the test-suite share: a dense float64 oracle, hostile problems, and the comparison."""
