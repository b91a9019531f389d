"""Random programs, held against a float64 loop over single samples; what fails is shrunk and kept."""
