"""What is trained on: text and small sets of images."""
