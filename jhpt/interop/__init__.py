"""A trained run in use: loaded, generating, scoring, evaluated, exported, and under an evaluation harness."""
