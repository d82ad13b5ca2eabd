"""Servers that are to compute the rotation of a trained model, by the settings they start with."""

from posenc.transformers.served.checking import CheckedServer, ServedDifference, check_served
from posenc.transformers.served.launch import StartedServer

__all__ = ["CheckedServer", "ServedDifference", "StartedServer", "check_served"]
