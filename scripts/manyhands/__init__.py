"""Many Hands: neural-network training spread over many processors, built by hand."""
