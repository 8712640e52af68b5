"""The door of PyTorch Lightning."""
