"""What the product's figures are measured with. `python -m benchmarks --help` lists the commands."""
