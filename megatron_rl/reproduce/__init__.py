"""The papers' claims that need no large model, regenerated: each as a page with tables and a figure."""

from megatron_rl.reproduce.page import Page, list_pages, make_page, write_page

__all__ = ["Page", "list_pages", "make_page", "write_page"]
