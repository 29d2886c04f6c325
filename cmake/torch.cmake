# find_torch(<arguments of find_package>): find_package(Torch), which needs no CUDA toolkit here.
#
# The search for one that a CUDA build of torch makes part of it fails on the packages of PyPI, which have no
# libcudart.so, and sets architectures of its own. It is skipped where the target exists that it would make;
# torch's libraries find CUDA's by themselves. Who wants it calls find_package(Torch) first.
macro(find_torch)
  if(NOT TARGET torch::cudart)
    add_library(torch::cudart INTERFACE IMPORTED)
  endif()
  find_package(Torch ${ARGN})
endmacro()
