"""What the scripts that run in other trainers' environments share; their folder is the first in Python's path."""


def said(call):
    """What a call returns, or the error that it raises as a text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def start_ray(tries=3, cpus=1, **options):
    """Ray gives its node 30 seconds, which are not enough on a machine that is busy with other tests."""
    import ray

    try:
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, **options)
    except Exception:
        if tries == 1:
            raise
        ray.shutdown()
        start_ray(tries - 1, cpus, **options)
