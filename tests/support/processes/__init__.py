"""Tests in real processes: harnesses, jobs and limits."""
