"""Composition: encoders and a language model that were trained apart, joined into one module that trains as a pipeline."""
