"""Short names for TORCH_LOGS, through the entry-point group "torch.backends".

torch loads that group while it is imported, from 2.13 on before it reads TORCH_LOGS. On earlier versions the
names come too late, and the long one has to do: TORCH_LOGS="+inductor_fusions".
"""


def register() -> None:
    """Register the log `fusions` and the artifact `fusion_misses`; a failure is one warning."""
    try:
        from torch._logging import _internal as logs

        logs.register_log("fusions", "inductor_fusions")
        logs.register_artifact(
            "fusion_misses",
            "Each site that inductor_fusions did not fuse, and why. With a warm cache no pass runs, so "
            "there are fewer or none: inductor_fusions.report() has all.",
            visible=True,
            off_by_default=True,
        )
    except Exception:  # an import of torch must not fail because of the name of a log
        import warnings

        warnings.warn(
            "inductor_fusions: TORCH_LOGS knows only the long name, +inductor_fusions", stacklevel=2
        )
