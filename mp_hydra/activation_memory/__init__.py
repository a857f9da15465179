"""What a training step keeps for its backward pass, made smaller: lean layers and functions, and recomputation.

The layers stay Keras layers; what changes lives on the instance and in functions of Keras' backend while a model that was
made lean is being called. Nothing of it is saved with the model.
"""
