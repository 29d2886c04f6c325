#include "custom_cell/compile.h"

#include "common/runtime/compiler.h"

#ifdef LLTM_EXT_WITH_CUDA
LLTM_EMBED(portable_h, "common/portable.h");
LLTM_EMBED(types_h, "common/types.h");
LLTM_EMBED(vec_cuh, "common/vec.cuh");
LLTM_EMBED(math_h, "common/math.h");
LLTM_EMBED(fast_math_cuh, "common/fast_math.cuh");
LLTM_EMBED(ptx_cuh, "common/ptx.cuh");
LLTM_EMBED(launch_cuh, "common/launch.cuh");
LLTM_EMBED(tensor_map_h, "common/hopper/tensor_map.h");
LLTM_EMBED(sizes_h, "common/hopper/sizes.h");
LLTM_EMBED(hopper_ptx_cuh, "common/hopper/ptx.cuh");
LLTM_EMBED(pipeline_cuh, "common/hopper/pipeline.cuh");
LLTM_EMBED(split_cuh, "common/hopper/split.cuh");
LLTM_EMBED(cell_h, "recurrence/cell.h");
LLTM_EMBED(over_units_h, "recurrence/over_units.h");
LLTM_EMBED(variants_h, "recurrence/persistent/variants.h");
LLTM_EMBED(shape_h, "recurrence/persistent/shape.h");
LLTM_EMBED(pair_cuh, "recurrence/persistent/pair.cuh");
LLTM_EMBED(product_cuh, "recurrence/persistent/product.cuh");
LLTM_EMBED(exchange_cuh, "recurrence/persistent/exchange.cuh");
LLTM_EMBED(heads_cuh, "recurrence/persistent/heads.cuh");
LLTM_EMBED(own_heads_cuh, "recurrence/persistent/own_heads.cuh");
LLTM_EMBED(units_cuh, "recurrence/persistent/units.cuh");
LLTM_EMBED(block_cuh, "recurrence/persistent/block.cuh");
LLTM_EMBED(steps_cuh, "recurrence/persistent/steps.cuh");
LLTM_EMBED(row_per_block_cuh, "recurrence/persistent/row_per_block.cuh");
LLTM_EMBED(forward_cuh, "recurrence/persistent/forward.cuh");
LLTM_EMBED(backward_cuh, "recurrence/persistent/backward.cuh");
LLTM_EMBED(unit_shape_h, "recurrence/without_product/shape.h");
LLTM_EMBED(unit_steps_cuh, "recurrence/without_product/steps.cuh");
LLTM_EMBED(unit_forward_cuh, "recurrence/without_product/forward.cuh");
LLTM_EMBED(unit_backward_cuh, "recurrence/without_product/backward.cuh");
LLTM_EMBED(unit_tiles_cuh, "recurrence/without_product/tiles.cuh");
LLTM_EMBED(doubles_cuh, "scan/doubles.cuh");
LLTM_EMBED(look_back_cuh, "scan/look_back.cuh");
LLTM_EMBED(tile_states_cuh, "scan/tile_states.cuh");
LLTM_EMBED(step_h, "recurrence/stepwise/step.h");
LLTM_EMBED(pointwise_cuh, "recurrence/stepwise/pointwise.cuh");
LLTM_EMBED(rows_h, "recurrence/stepwise/rows.h");
LLTM_EMBED(rows_cuh, "recurrence/stepwise/rows.cuh");
LLTM_EMBED(reduce_cuh, "common/reduce.cuh");
LLTM_EMBED(single_step_h, "recurrence/stepwise/single_step.h");
LLTM_EMBED(single_step_cuh, "recurrence/stepwise/single_step.cuh");
LLTM_EMBED(small_batch_shape_h, "recurrence/stepwise/small_batch_shape.h");
LLTM_EMBED(small_batch_cuh, "recurrence/stepwise/small_batch.cuh");
LLTM_EMBED(fused_shape_h, "recurrence/stepwise/fused_shape.h");
LLTM_EMBED(fused_arguments_h, "recurrence/stepwise/fused_arguments.h");
LLTM_EMBED(fused_hopper_cuh, "recurrence/stepwise/fused_hopper.cuh");
LLTM_EMBED(large_shape_h, "recurrence/large/shape.h");
LLTM_EMBED(large_arguments_h, "recurrence/large/arguments.h");
LLTM_EMBED(large_block_cuh, "recurrence/large/block.cuh");
LLTM_EMBED(large_loads_cuh, "recurrence/large/loads.cuh");
LLTM_EMBED(large_products_cuh, "recurrence/large/products.cuh");
LLTM_EMBED(large_cells_cuh, "recurrence/large/cells.cuh");
LLTM_EMBED(large_kernel_cuh, "recurrence/large/kernel.cuh");
LLTM_EMBED(large_forward_cuh, "recurrence/large/forward.cuh");
LLTM_EMBED(large_backward_cuh, "recurrence/large/backward.cuh");
#endif

namespace lltm_ext {
namespace {

// The headers that the kernels of a cell include.
const std::vector<Header> kHeaders = {
#ifdef LLTM_EXT_WITH_CUDA
    portable_h,
    types_h,
    vec_cuh,
    math_h,
    fast_math_cuh,
    ptx_cuh,
    launch_cuh,
    tensor_map_h,
    sizes_h,
    hopper_ptx_cuh,
    pipeline_cuh,
    split_cuh,
    cell_h,
    over_units_h,
    variants_h,
    shape_h,
    pair_cuh,
    product_cuh,
    exchange_cuh,
    heads_cuh,
    own_heads_cuh,
    units_cuh,
    block_cuh,
    steps_cuh,
    row_per_block_cuh,
    forward_cuh,
    backward_cuh,
    unit_shape_h,
    unit_steps_cuh,
    unit_forward_cuh,
    unit_backward_cuh,
    doubles_cuh,
    look_back_cuh,
    tile_states_cuh,
    unit_tiles_cuh,
    step_h,
    pointwise_cuh,
    rows_h,
    rows_cuh,
    fused_shape_h,
    fused_arguments_h,
    fused_hopper_cuh,
    large_shape_h,
    large_arguments_h,
    large_block_cuh,
    large_loads_cuh,
    large_products_cuh,
    large_cells_cuh,
    large_kernel_cuh,
    large_forward_cuh,
    large_backward_cuh,
    small_batch_shape_h,
    small_batch_cuh,
    reduce_cuh,
    single_step_h,
    single_step_cuh
#endif
};

const std::vector<std::string> kOptions = {"--std=c++17", "--device-as-default-execution-space"};

}  // namespace

std::string compile_cell(const CellProgram& program, const CellKernel& kernel,
                         const std::string& architecture) {
  const std::string description = program.name + (kernel.backward ? ": backward" : "");
  return compile(description, program.source(kernel), kHeaders, kOptions, architecture);
}

}  // namespace lltm_ext
