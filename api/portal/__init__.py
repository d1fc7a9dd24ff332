"""The portal: pages for people. They call the same services as REST."""

from busbar.api.portal.install import error_page, install

__all__ = ["error_page", "install"]
