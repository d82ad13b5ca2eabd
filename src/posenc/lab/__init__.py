"""The lab: training, comparison, extension and measurement of models, and the command line."""
