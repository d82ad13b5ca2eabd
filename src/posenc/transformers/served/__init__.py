"""Servers that are to compute the rotation of a trained model, by the settings they start with."""

from posenc.transformers.served.checking import CheckedServer, Mismatch, check_served
from posenc.transformers.served.launch import Launch

__all__ = ["CheckedServer", "Launch", "Mismatch", "check_served"]
