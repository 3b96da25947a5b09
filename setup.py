"""Only what pyproject.toml cannot say: the cffi extension."""

from setuptools import setup

setup(cffi_modules=["native/libdsec_build.py:ffi"])
