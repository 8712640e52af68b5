"""Small models to train: perceptron, CNN, GPT, linear regression."""
