"""Models and data to try strategies with: `ringstrategy-train model=cnn data=digits`, benchmarks, tests."""
