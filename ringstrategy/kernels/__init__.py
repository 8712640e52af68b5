"""The arithmetic of codecs and buckets on each kind of device."""
