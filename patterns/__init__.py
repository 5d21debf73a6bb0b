"""The patterns that ship with rope_fusion, one file each; imported as ``rope_fusion.patterns``."""

if __name__ != "rope_fusion.patterns":
    raise ImportError(
        f"these patterns were imported as {__name__!r}, which would load a second copy of them; "
        "import rope_fusion.patterns instead (in a checkout: pip install -e .)"
    )
