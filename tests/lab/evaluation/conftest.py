"""Measurements that take less time than those of a user."""

from __future__ import annotations

from tests.support.measuring import few_windows

__all__ = ["few_windows"]
