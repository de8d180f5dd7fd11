"""Lesson 00: what training costs, a job's parts and places, and error against data size."""
