"""What a run is: frozen, keyword-only dataclasses and the codec that reads and writes them. Standard library only."""
