"""Comparing arms under equal conditions."""
