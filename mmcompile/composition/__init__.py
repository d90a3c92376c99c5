"""Composition: encoders and a language model, trained apart, joined into one module that trains as a pipeline."""
