"""Diagnosis of the positions of a transformers model, from its ``config.json``."""

from posenc.evaluation.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
