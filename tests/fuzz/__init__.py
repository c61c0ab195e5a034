"""Hostile requests over Flight and HTTP, sent to a real daemon with a limited address space."""
