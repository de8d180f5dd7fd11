"""Lesson 03: how many steps each batch size needs, and what gradient noise says of it."""
