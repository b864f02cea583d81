"""The words the parts of Naru share: wire messages, custom resources, names, shapes, errors.

Imported by every part; imports none of them and does no I/O. Nothing is imported here at the package's door, so that a
worker pays for protobuf only and not for pydantic.
"""
