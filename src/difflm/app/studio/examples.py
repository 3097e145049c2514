"""Requests that show what a bundled model does well: the studio's page opens with the first, and offers the others."""

from typing import Any

EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "english": {
        "a gap": {"infill": "We ___ because it was raining."},
        "two gaps": {"infill": "The meeting ___:3 because ___."},
        "best of eight": {"infill": "If it rains tomorrow, we will ___.", "candidates": 8, "n": 2},
        "words": {"infill": "She opened ___.", "contains": ["letter"], "avoid": ["door"]},
        "a rewrite": {
            "edit": "The train was late again, so we walked home.",
            "keep": ["train"],
            "strength": 0.6,
        },
    },
    "e2e": {
        "a fact": {"field": {"food": "Japanese"}, "length": 18},
        "gaps": {"infill": "The ___:2 is a ___ near Café Rouge.", "field": {"food": "Indian"}},
        "a rewrite": {"edit": "The Mill is a cheap pub near the river.", "keep": ["Mill"], "strength": 0.4},
        "tags": {"pos": "PROPN AUX DET ADJ NOUN ADP DET NOUN PUNCT"},
        "words": {"contains": ["coffee shop", "riverside"], "avoid": ["cheap"], "length": 20},
        "best of four": {"field": {"area": "riverside", "price": "high"}, "length": 16, "candidates": 4, "n": 2},
    },
    "e2e-fast": {
        "four texts": {"n": 4},
        "a gap": {"infill": "The ___:2 is a ___ near Café Rouge."},
        "words": {"contains": ["coffee shop", "riverside"], "avoid": ["cheap"], "length": 20},
        "a fact": {"field": {"food": "Japanese"}, "length": 18, "candidates": 4},
        "tags": {"pos": "PROPN AUX DET ADJ NOUN ADP DET NOUN PUNCT", "candidates": 4},
    },
}
